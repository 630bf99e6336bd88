"""What backends ("engines") share: grouping tokens before their products and combining results after them."""
