//! The file of a model.

#[cfg(feature = "hub")]
use crate::args::HubArgs;
use crate::failure::CommandResult;
#[cfg(feature = "hub")]
use crate::hub::NamedModel;
use samite::gguf::{GgufFile, LoadMode};
use std::path::{Path, PathBuf};

/// Name of the built-in model in messages.
const EMBEDDED: &str = "the stories model";

/// The file of a model.
#[derive(Clone)]
pub enum ModelFile {
    /// The built-in model.
    Embedded,
    /// A file on this machine.
    File(PathBuf),
    /// A model on a hub, which is downloaded when its file is needed.
    #[cfg(feature = "hub")]
    Named(NamedModel),
}

impl ModelFile {
    /// Returns the file at `path`, or the built-in model without one.
    pub fn new(path: Option<PathBuf>) -> Self {
        path.map_or(ModelFile::Embedded, ModelFile::File)
    }

    /// Returns the model on a hub that flags name, or `self` if they name none.
    #[cfg(feature = "hub")]
    pub fn or_named(self, args: &HubArgs) -> CommandResult<Self> {
        Ok(NamedModel::new(args)?.map_or(self, ModelFile::Named))
    }

    /// Returns whether the model is the built-in one.
    pub fn is_embedded(&self) -> bool {
        matches!(self, ModelFile::Embedded)
    }

    /// Returns the path, or `None` for the built-in model. Downloads a model given by name.
    pub fn path(&self) -> CommandResult<Option<&Path>> {
        match self {
            ModelFile::Embedded => Ok(None),
            ModelFile::File(path) => Ok(Some(path)),
            #[cfg(feature = "hub")]
            ModelFile::Named(model) => model.path().map(Some),
        }
    }

    /// Opens the file with its weights.
    pub fn open(&self, mode: LoadMode) -> CommandResult<GgufFile> {
        Ok(match self.path()? {
            Some(path) => GgufFile::open(path, mode)?,
            None => embedded()?,
        })
    }

    /// Opens the header of the file.
    pub fn open_header(&self, mode: LoadMode) -> CommandResult<GgufFile> {
        Ok(match self.path()? {
            Some(path) => GgufFile::open_header(path, mode)?,
            None => embedded()?,
        })
    }
}

/// Returns the built-in model.
pub fn embedded() -> samite::llm::Result<GgufFile> {
    Ok(GgufFile::from_static(EMBEDDED, samite_stories::MODEL)?)
}
