"""What teachers are told, and which rows they score."""
