//! The executable specification: a scalar, slow, obviously right device.
