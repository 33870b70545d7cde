//! Templates that go by a name.

/// Names and texts.
pub const BUILTIN: &[(&str, &str)] = &[("chatml", include_str!("templates/chatml.jinja"))];
