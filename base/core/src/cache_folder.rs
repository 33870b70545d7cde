//! Folder for cached facts about the machine.

use std::path::PathBuf;

/// Returns the user's folder for data that can be found out again: `samite` in the system's cache
/// folder. `None` if the environment does not name one.
pub fn cache_folder() -> Option<PathBuf> {
    let path = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let folder = if cfg!(windows) {
        path("LOCALAPPDATA")?
    } else if cfg!(target_os = "macos") {
        path("HOME")?.join("Library/Caches")
    } else {
        path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))?
    };
    Some(folder.join("samite"))
}
