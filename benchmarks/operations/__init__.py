"""Every fused operation on the shapes it is measured with, beside its peers."""
