"""The ledger of paged blocks: leases, reference counts, the prefix index and its eviction."""
