"""fairscale's OSS and SDP."""
