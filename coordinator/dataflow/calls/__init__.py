"""What the role handles of algorithms stand on: calls, dealt out over services."""
