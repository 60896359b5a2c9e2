"""What brings the op to models as they are."""
