"""Which nodes a request may go to, and which it goes to."""
