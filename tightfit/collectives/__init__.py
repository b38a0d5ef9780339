"""What ranks exchange and how they hold one tensor together. Knows no model and no layout."""
