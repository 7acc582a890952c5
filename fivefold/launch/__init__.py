"""How ranks start, meet, and are watched: forked on this machine, or started by a launcher."""
