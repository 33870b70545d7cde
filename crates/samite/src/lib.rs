//! One compute graph woven through many devices: the facade crate.
