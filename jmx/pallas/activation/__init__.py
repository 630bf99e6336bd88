"""The derivative of the activation between both products, as a kernel of its own."""
