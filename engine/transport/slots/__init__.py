"""Files of shared memory that outlive their process."""
