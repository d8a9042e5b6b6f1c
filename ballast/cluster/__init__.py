"""Worker processes, and the controller that knows them."""
