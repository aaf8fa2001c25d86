"""OSS and SDP from fairscale."""
