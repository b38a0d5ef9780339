"""One script per claim, measured beside its peers; rows in results/, tables and pictures of the pages in reports/."""
