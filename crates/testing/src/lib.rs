//! The conformance suite: every device against the reference.
