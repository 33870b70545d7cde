//! Places, splits, plans and runs a graph over several devices.
