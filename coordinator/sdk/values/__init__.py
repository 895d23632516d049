"""What services and coordinators tell, as immutable values."""
