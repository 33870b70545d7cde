//! Finds files that may be plugins.

use std::path::{Path, PathBuf};

/// File extension of plugins. macOS uses the same one as other Unix systems.
pub const EXTENSION: &str = if cfg!(windows) { "dll" } else { "so" };

/// A file with the name of a plugin: `[lib]ggml-<name>[-variant].so`, or `.dll` on Windows.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Candidate {
    /// Name of the backend. If several files have the same name, the best one is used.
    pub name: String,
    /// Path of the file.
    pub path: PathBuf,
}

/// Returns the name of the backend from the name of a plugin's file.
pub fn backend_name(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(EXTENSION)?.strip_suffix('.')?;
    let rest = stem
        .strip_prefix("lib")
        .unwrap_or(stem)
        .strip_prefix("ggml-")?;
    let name = rest.split('-').next()?;
    // Not the library that all plugins need, nor samite as a plugin for other programs.
    (!name.is_empty() && name != "base" && name != "samite").then_some(name)
}

/// Returns the plugins in a directory, sorted. A directory that does not exist has none.
///
/// # Errors
/// Returns an error if the directory cannot be read.
pub fn in_directory(directory: &Path) -> Result<Vec<Candidate>, String> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let mut found: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter_map(|path| {
            Some(Candidate {
                name: backend_name(&path)?.to_owned(),
                path,
            })
        })
        .collect();
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_names_are_parsed_from_file_names() {
        let name = |file: &str| backend_name(Path::new(file)).map(str::to_owned);
        assert_eq!(name("/x/libggml-cpu-haswell.so").as_deref(), Some("cpu"));
        assert_eq!(name("/x/ggml-vulkan.so").as_deref(), Some("vulkan"));
        for other in [
            "/x/libggml-base.so",
            "/x/libggml-samite.so",
            "/x/libggml.so",
            "/x/libggml-.so",
            "/x/libggml-cpu.so.0",
            "/x/libllama.so",
            "/",
        ] {
            assert_eq!(name(other), None, "{other}");
        }
    }

    #[test]
    fn directories_are_listed_in_order() {
        let directory = tempfile::tempdir().unwrap();
        for file in ["libggml-cpu-b.so", "libggml-cpu-a.so", "notes.txt"] {
            std::fs::write(directory.path().join(file), "").unwrap();
        }
        let found = in_directory(directory.path()).unwrap();
        let files: Vec<_> = found
            .iter()
            .filter_map(|c| c.path.file_name()?.to_str())
            .collect();
        assert_eq!(files, ["libggml-cpu-a.so", "libggml-cpu-b.so"]);
        assert_eq!(in_directory(Path::new("/does/not/exist")), Ok(Vec::new()));
        assert!(in_directory(&directory.path().join("notes.txt")).is_err());
    }
}
