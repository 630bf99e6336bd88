"""What every part uses: checks of arguments, files that appear whole, tables for a terminal."""
