"""Questions about learning that a user answers with runs of their own task."""
