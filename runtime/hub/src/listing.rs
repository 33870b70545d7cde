//! Files of a repository, and the selection of a model among them.

use crate::error::{Error, Result};
use crate::reference::{Reference, is_inner_path};
use serde::{Deserialize, Serialize};

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RemoteFile {
    /// Path in the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Name of its content in the cache.
    pub blob: String,
    /// SHA-256 of its content in hexadecimal, if the hub provides it, as for large files.
    pub sha256: Option<String>,
}

/// Files of a repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// `owner/name`.
    pub repository: String,
    /// Requested revision, usually `main`.
    pub revision: String,
    /// Commit hash.
    pub commit: String,
    /// Model files and parts of split models, by path.
    pub files: Vec<RemoteFile>,
}

/// An entry as the hub describes it.
#[derive(Deserialize)]
pub(crate) struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Large>,
}

#[derive(Deserialize)]
struct Large {
    oid: String,
    size: u64,
}

fn is_hex(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl Entry {
    /// Returns the file, if it is a model file with a path that is valid in a cache.
    pub fn into_file(self) -> Option<RemoteFile> {
        let is_model = self.kind == "file" && self.path.to_ascii_lowercase().ends_with(".gguf");
        if !is_model || !is_inner_path(&self.path) {
            return None;
        }
        let (blob, size, sha256) = match self.lfs {
            Some(large) if is_hex(&large.oid, 64) => {
                let hash = large.oid.to_ascii_lowercase();
                (hash.clone(), large.size, Some(hash))
            }
            Some(_) => return None,
            None if is_hex(&self.oid, 40) => (self.oid.to_ascii_lowercase(), self.size, None),
            None => return None,
        };
        Some(RemoteFile {
            path: self.path,
            size,
            blob,
            sha256,
        })
    }
}

/// Default quantizations in order of preference.
const PREFERRED: [&str; 3] = ["Q4_K_M", "Q4_0", "Q8_0"];

/// Splits the name of a part, such as `x-00002-of-00005.gguf`, into its stem, number and count.
fn part(path: &str) -> Option<(&str, usize, usize)> {
    let stem = path.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(number) || !is_number(count) {
        return None;
    }
    let (number, count) = (number.parse().ok()?, count.parse().ok()?);
    (1..=count)
        .contains(&number)
        .then_some((name, number, count))
}

/// Returns whether the name of a file or its folder contains this quantization.
fn says(path: &str, quantization: &str) -> bool {
    let (path, wanted) = (path.to_ascii_lowercase(), quantization.to_ascii_lowercase());
    path.match_indices(&wanted).any(|(at, _)| {
        let is_edge = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.' | '/' | '_'));
        // Q4_K is not Q4_K_M.
        let after = path[at + wanted.len()..].chars().next();
        is_edge(path[..at].chars().next_back()) && is_edge(after) && after != Some('_')
    })
}

/// Returns false for projectors and importance matrices, which are not models of their own.
pub(crate) fn is_model(path: &str) -> bool {
    let name = path
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_ascii_lowercase();
    !name.contains("mmproj") && !name.contains("imatrix")
}

impl Listing {
    /// Returns whether a file is a part of a split model, but not the first.
    pub(crate) fn is_later_part(&self, path: &str) -> bool {
        part(path).is_some_and(|(_, number, _)| number != 1)
    }

    /// Returns the shortest reference to a model: by its quantization if that selects it, otherwise
    /// by its file.
    pub fn reference(&self, file: &str) -> Reference {
        let stem = part(file).map_or(file, |(stem, ..)| stem);
        let stem = stem.strip_suffix(".gguf").unwrap_or(stem);
        let quantization = stem.rsplit(['-', '.', '/']).next().unwrap_or(stem);
        let by = |wanted: &str| Reference {
            repository: self.repository.clone(),
            wanted: Some(wanted.to_owned()),
        };
        let short = by(quantization);
        let chosen = self.choose(&short).ok();
        let first = chosen.as_ref().and_then(|files| files.first());
        if first.is_some_and(|first| first.path == file) {
            short
        } else {
            by(file)
        }
    }

    /// Returns the files of the requested model: one file, or all parts in order.
    ///
    /// # Errors
    /// [`Error::NotFound`], which lists the available models.
    pub fn choose(&self, reference: &Reference) -> Result<Vec<&RemoteFile>> {
        // Whole files, and first parts of split models.
        let models = || {
            let files = self.files.iter().filter(|file| is_model(&file.path));
            files.filter(|file| part(&file.path).is_none_or(|(_, number, _)| number == 1))
        };
        let found = match reference.wanted.as_deref() {
            Some(path) if path.to_ascii_lowercase().ends_with(".gguf") => {
                self.files.iter().find(|file| file.path == path)
            }
            Some(quantization) => models().find(|file| says(&file.path, quantization)),
            None => PREFERRED
                .iter()
                .find_map(|wanted| models().find(|file| says(&file.path, wanted)))
                .or_else(|| models().next()),
        };
        let Some(first) = found else {
            let names: Vec<&str> = models().map(|file| file.path.as_str()).collect();
            return Err(Error::NotFound(
                match (names.is_empty(), &reference.wanted) {
                    (true, _) => format!(
                        "{} has no GGUF file: look for a repository whose name ends with -GGUF",
                        self.repository
                    ),
                    (false, wanted) => format!(
                        "{} has no {}; it has {}",
                        self.repository,
                        wanted.as_deref().unwrap_or("model"),
                        names.join(", ")
                    ),
                },
            ));
        };
        let Some((name, _, count)) = part(&first.path) else {
            return Ok(vec![first]);
        };
        (1..=count)
            .map(|number| {
                let path = format!("{name}-{number:05}-of-{count:05}.gguf");
                let found = self.files.iter().find(|file| file.path == path);
                found.ok_or_else(|| {
                    Error::NotFound(format!(
                        "{} lacks a part of the model: {path}",
                        self.repository
                    ))
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(paths: &[&str]) -> Listing {
        let file = |path: &&str| RemoteFile {
            path: (*path).to_owned(),
            size: 1,
            blob: "0".repeat(40),
            sha256: None,
        };
        Listing {
            repository: "a/b".to_owned(),
            revision: "main".to_owned(),
            commit: "0".repeat(40),
            files: paths.iter().map(file).collect(),
        }
    }

    fn chosen(paths: &[&str], wanted: Option<&str>) -> std::result::Result<Vec<String>, String> {
        let reference = Reference {
            repository: "a/b".to_owned(),
            wanted: wanted.map(str::to_owned),
        };
        let listing = listing(paths);
        let files = listing
            .choose(&reference)
            .map_err(|error| error.to_string())?;
        Ok(files.iter().map(|file| file.path.clone()).collect())
    }

    #[test]
    fn the_wanted_model_is_found() {
        let paths = [
            "mmproj-Q4_K_M.gguf",
            "x-Q2_K.gguf",
            "x-Q4_K_M.gguf",
            "x-Q4_K_S.gguf",
            "x.q8_0.gguf",
            "BF16/x-BF16-00001-of-00002.gguf",
            "BF16/x-BF16-00002-of-00002.gguf",
            "x-UD-Q4_K_XL.gguf",
        ];
        for (wanted, expected) in [
            (None, &["x-Q4_K_M.gguf"][..]),
            (Some("q4_k_s"), &["x-Q4_K_S.gguf"]),
            (Some("Q8_0"), &["x.q8_0.gguf"]),
            (Some("UD-Q4_K_XL"), &["x-UD-Q4_K_XL.gguf"]),
            (
                Some("bf16"),
                &[
                    "BF16/x-BF16-00001-of-00002.gguf",
                    "BF16/x-BF16-00002-of-00002.gguf",
                ],
            ),
            (Some("mmproj-Q4_K_M.gguf"), &["mmproj-Q4_K_M.gguf"]),
        ] {
            assert_eq!(chosen(&paths, wanted).unwrap(), expected, "{wanted:?}");
        }
        for wanted in ["Q4_K", "Q5_K_M", "8_0", "y.gguf"] {
            let error = chosen(&paths, Some(wanted)).unwrap_err();
            assert!(
                error.contains(wanted) && error.contains("x-Q2_K.gguf"),
                "{error}"
            );
        }
        assert_eq!(
            chosen(&["z-F16.gguf", "mmproj.gguf"], None).unwrap(),
            ["z-F16.gguf"]
        );
        assert!(chosen(&[], None).unwrap_err().contains("-GGUF"));
        assert!(
            chosen(&paths[..6], Some("bf16"))
                .unwrap_err()
                .contains("00002-of-00002")
        );
    }

    #[test]
    fn references_are_short_and_select_their_file() {
        let listing = listing(&[
            "x-Q4_K_M.gguf",
            "x-Q4_K_S.gguf",
            "y-Q4_K_S.gguf",
            "x.q8_0.gguf",
            "BF16/x-BF16-00001-of-00002.gguf",
            "BF16/x-BF16-00002-of-00002.gguf",
            "z-00001-of-00000.gguf",
        ]);
        for (file, expected) in [
            ("z-00001-of-00000.gguf", "a/b:00000"),
            ("x-Q4_K_M.gguf", "a/b:Q4_K_M"),
            ("x.q8_0.gguf", "a/b:q8_0"),
            ("BF16/x-BF16-00001-of-00002.gguf", "a/b:BF16"),
            ("x-Q4_K_S.gguf", "a/b:Q4_K_S"),
            ("y-Q4_K_S.gguf", "a/b:y-Q4_K_S.gguf"),
        ] {
            let reference = listing.reference(file);
            assert_eq!(reference.to_string(), expected);
            assert_eq!(listing.choose(&reference).unwrap()[0].path, file);
        }
    }

    #[test]
    fn harmful_listing_entries_are_ignored() {
        let entry = |path: &str, oid: &str, lfs: &str| -> Option<RemoteFile> {
            let json = format!(r#"{{"type":"file","path":{path:?},"size":3,"oid":{oid:?}{lfs}}}"#);
            serde_json::from_str::<Entry>(&json).unwrap().into_file()
        };
        let (small, large) = ("a".repeat(40), "B".repeat(64));
        assert!(entry("x/y.gguf", &small, "").is_some());
        let file = entry(
            "y.GGUF",
            &small,
            &format!(r#","lfs":{{"oid":{large:?},"size":7}}"#),
        )
        .unwrap();
        assert_eq!(
            (file.size, file.sha256.as_deref()),
            (7, Some("b".repeat(64).as_str()))
        );
        for (path, oid) in [
            ("../y.gguf", &*small),
            ("/y.gguf", &small),
            ("y.txt", &small),
            ("y.gguf", "../../x"),
            ("a\\y.gguf", &small),
        ] {
            assert!(entry(path, oid, "").is_none(), "{path} {oid}");
        }
        assert!(entry("y.gguf", &small, r#","lfs":{"oid":"../x","size":7}"#).is_none());
    }
}
