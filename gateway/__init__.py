"""The border: text and protocols outside, integers and records inside."""
