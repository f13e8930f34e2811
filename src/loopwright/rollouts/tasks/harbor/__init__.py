"""Tasks in Harbor's directory format."""
