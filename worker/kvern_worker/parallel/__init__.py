"""Where what is spread over ranks lies."""
