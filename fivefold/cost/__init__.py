"""What a job takes, in bytes and seconds: the same arithmetic for one layout and for a million."""
