"""What people read: plan files in words, and comparisons as one HTML or PNG file."""
