"""What makes advantages, or pairs, of rewards, and which rows are kept."""
