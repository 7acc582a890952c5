"""Any rank of any job on one machine: the real program without the others."""
