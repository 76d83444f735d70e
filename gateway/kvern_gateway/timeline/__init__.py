"""A request's timeline, in words and as a picture."""
