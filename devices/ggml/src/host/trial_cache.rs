//! Disk cache of verdicts on plugins' devices.
//!
//! They apply to a file with the same size and modification time, and to one version of samite.

use crate::abi::Version;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Identity of each device, with its failure if it has one.
type Devices = Vec<(String, Option<String>)>;

/// Cache file of the verdicts on one plugin, and its subject line.
pub struct TrialCache {
    file: PathBuf,
    subject: String,
}

impl TrialCache {
    /// Returns the verdicts on the plugin at `path`, if there is a cache folder.
    pub fn for_plugin(path: &Path) -> Option<Self> {
        Self::in_folder(&samite_core::cache_folder()?, path)
    }

    pub(super) fn in_folder(folder: &Path, path: &Path) -> Option<Self> {
        let about = std::fs::metadata(path).ok()?;
        let changed = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        let mut hasher = DefaultHasher::new();
        path.hash(&mut hasher);
        let stem = path.file_stem()?.to_string_lossy();
        Some(TrialCache {
            file: folder.join(format!("plugin-{stem}-{:016x}", hasher.finish())),
            subject: format!(
                "{} {} {} {}",
                env!("CARGO_PKG_VERSION"),
                about.len(),
                changed.as_nanos(),
                path.display()
            ),
        })
    }

    /// Returns the release as which a plugin without `libggml-base` works, and the verdicts, if
    /// they apply to the current file.
    pub fn read(&self) -> Option<(Option<Version>, Devices)> {
        let text = std::fs::read_to_string(&self.file).ok()?;
        let (subject, rest) = text.split_once('\n')?;
        let verdict = |line: &str| {
            let (identity, doubt) = line.split_once('\t')?;
            let doubt = (!doubt.is_empty()).then(|| doubt.to_owned());
            Some((identity.to_owned(), doubt))
        };
        if subject != self.subject {
            return None;
        }
        let (release, rest) = rest.split_once('\n')?;
        let release = match release {
            "" => None,
            release => Some(Version::of_release(release).ok()?),
        };
        Some((release, rest.lines().map(verdict).collect::<Option<_>>()?))
    }

    /// Stores verdicts. If that fails, the next run determines them again.
    pub fn write(&self, release: Option<Version>, devices: &Devices) {
        let release = release.map(|release| release.to_string());
        let mut text = format!("{}\n{}\n", self.subject, release.unwrap_or_default());
        for (identity, doubt) in devices {
            let doubt = doubt.as_deref().unwrap_or_default();
            let _ = writeln!(text, "{}\t{doubt}", identity.replace('\t', " "));
        }
        if let Some(folder) = self.file.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        // Two processes may write at once; a reader sees one version or the other.
        let unfinished = self.file.with_extension(std::process::id().to_string());
        let written = std::fs::write(&unfinished, text);
        if written
            .and_then(|()| std::fs::rename(&unfinished, &self.file))
            .is_err()
        {
            let _ = std::fs::remove_file(&unfinished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_cached_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("libggml-x.so");
        let kept = folder.path().join("kept");
        assert!(TrialCache::in_folder(&kept, &plugin).is_none(), "no file");
        std::fs::write(&plugin, "1").unwrap();
        let trial_cache = || TrialCache::in_folder(&kept, &plugin).unwrap();
        assert_eq!(trial_cache().read(), None);
        let devices = vec![
            ("A one".to_owned(), None),
            ("B".to_owned(), Some("no".to_owned())),
        ];
        let release = Some(Version::V28);
        trial_cache().write(release, &devices);
        assert_eq!(trial_cache().read(), Some((release, devices.clone())));
        // A plugin of the same name in another folder does not replace the verdicts.
        let other = folder.path().join("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("libggml-x.so"), "1").unwrap();
        let other = TrialCache::in_folder(&kept, &other.join("libggml-x.so")).unwrap();
        other.write(None, &Vec::new());
        assert_eq!(other.read(), Some((None, Vec::new())));
        assert_eq!(trial_cache().read(), Some((release, devices.clone())));
        std::fs::remove_file(&other.file).unwrap();
        assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 1);
        let time = std::fs::metadata(&plugin).unwrap().modified().unwrap();
        std::fs::write(&plugin, "12").unwrap();
        let file = std::fs::File::options().append(true).open(&plugin).unwrap();
        file.set_modified(time).unwrap();
        assert_eq!(trial_cache().read(), None, "another size");
        trial_cache().write(release, &devices);
        file.set_modified(UNIX_EPOCH).unwrap();
        assert_eq!(trial_cache().read(), None, "another time");
    }
}
