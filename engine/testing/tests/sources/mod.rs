//! Sources and documents of the workspace as text.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// Returns the Rust files and documents in `folder` and below, in order, without fixtures and
/// builds.
pub fn text_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !["target", "fixtures", "node_modules"].contains(&&*name) && !name.starts_with('.') {
                files.extend(text_files(&path));
            }
        } else if name.ends_with(".rs") || name.ends_with(".md") {
            files.push(path);
        }
    }
    files.sort();
    files
}
