"""What goes wrong, and what is seen of it: the rows, and a scene for each."""
