"""Let ranks agree, and learn at once what went wrong elsewhere."""
