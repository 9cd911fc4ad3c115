"""Direct links of the ring: an interface shaped by RDMA and the backends that offer it."""
