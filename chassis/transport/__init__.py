"""Direct links of the ring: an interface shaped by RDMA and the backends that offer it.

The scheme of an address says which backend carries a link: `tcp://host:port`, `unix:///path`,
`mem://name`. Sockets need nothing but an event loop; a memory transport belongs to its network.
"""
