"""What commands ask of a recipe or write into one."""
