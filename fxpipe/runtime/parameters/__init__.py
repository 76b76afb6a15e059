"""Make gradients whole across replicas, shards and tied copies."""
