"""Steps on a GPU that do not wait for the host: captured graphs, and their kernels compiled beforehand."""
