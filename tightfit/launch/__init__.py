"""Starting the processes of a run on one machine, and ending them together."""
