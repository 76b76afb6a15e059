"""Turn a traced graph and an assignment of its nodes into stage modules."""
