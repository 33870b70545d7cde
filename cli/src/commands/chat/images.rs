//! Images in the messages of a conversation.

use super::Chat;
use crate::shown::{counted, one_line, say};
use samite::chat::{Content, ContentPart};
use std::path::{Path, PathBuf};

impl Chat {
    /// Returns the image file that a line consists of: terminals paste the path of a file that is
    /// dragged into them.
    pub(super) fn dragged_image(&self, line: &str) -> Option<PathBuf> {
        self.images.as_ref()?;
        let path = image_path(line.trim());
        let extension = path.extension()?.to_str()?.to_ascii_lowercase();
        let is_image = ["png", "jpg", "jpeg", "webp", "gif"].contains(&extension.as_str());
        (is_image && path.is_file()).then_some(path)
    }

    /// Adds an image to the next message.
    pub(super) fn add_image(&mut self, path: &Path) {
        let Some(images) = &mut self.images else {
            return say("this model has no image encoder: --mmproj names one");
        };
        match crate::images::url(path) {
            Ok(url) => {
                images.push(url);
                let count = counted(images.len(), "image");
                say(format_args!("{count} for the next message"));
            }
            Err(failure) => say(format_args!("/image {}", one_line(&failure.text()))),
        }
    }

    /// Returns the content of a message: the images that were added, and its text.
    pub(super) fn content(&self, text: &str) -> Content {
        match &self.images {
            Some(images) if !images.is_empty() => {
                let images = images.iter().map(ContentPart::image);
                Content::Parts(images.chain([ContentPart::text(text)]).collect())
            }
            _ => text.into(),
        }
    }

    /// Removes the images that were added.
    pub(super) fn forget_images(&mut self) {
        self.images.iter_mut().for_each(Vec::clear);
    }
}

/// Returns the path in a text that a user wrote, or that a terminal pasted.
pub(super) fn image_path(text: &str) -> PathBuf {
    let plain = unquoted(text);
    let plain = plain.strip_prefix("file://").unwrap_or(&plain);
    let home = std::env::var_os("HOME");
    match plain.strip_prefix("~/").zip(home) {
        Some((rest, home)) => Path::new(&home).join(rest),
        None => plain.into(),
    }
}

/// Returns a path without the quotes or backslashes that terminals add.
fn unquoted(text: &str) -> String {
    for quote in ['\'', '"'] {
        let inner = text.strip_prefix(quote);
        if let Some(inner) = inner.and_then(|inner| inner.strip_suffix(quote)) {
            return inner.to_owned();
        }
    }
    if cfg!(windows) {
        return text.to_owned();
    }
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        plain.extend(match letter {
            '\\' => letters.next(),
            letter => Some(letter),
        });
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn paths_lose_what_terminals_add() {
        for text in ["/a b.png", "'/a b.png'", "\"/a b.png\"", "/a\\ b.png"] {
            assert_eq!(image_path(text), Path::new("/a b.png"));
        }
        assert_eq!(image_path("file:///a.png"), Path::new("/a.png"));
    }
}
