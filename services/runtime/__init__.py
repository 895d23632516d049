"""What every service needs, written once."""
