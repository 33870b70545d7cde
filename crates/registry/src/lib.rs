//! Finds and lists samite's backends and devices.
