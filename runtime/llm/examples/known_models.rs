//! Writes the models of `tests/all/llama_cpp.rs` to a folder, for
//! `tests/fixtures/llama_cpp/make.py`.

#[path = "../tests/all/common/known.rs"]
mod known;

use std::fmt::Write;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os()
        .nth(1)
        .ok_or("usage: known_models FOLDER")?;
    let folder = PathBuf::from(folder);
    std::fs::create_dir_all(&folder)?;
    let mut cases = String::new();
    for known in known::known() {
        let path = folder.join(format!("{}.gguf", known.name));
        known.model.write(&path)?;
        write!(cases, "{} {} {}", known.name, known.cut, known.model.dtype)?;
        for (number, share) in known.adapters.iter().enumerate() {
            known::write_adapter(&path, number, |name| known.is_changed(name))?;
            write!(cases, " {share}")?;
        }
        writeln!(cases)?;
    }
    let mut embeddings = String::new();
    for known in known::known_embeddings() {
        known
            .model
            .write(folder.join(format!("{}.gguf", known.name)))?;
        writeln!(embeddings, "{} {}", known.name, known.pooling as usize)?;
    }
    let decoders = folder.join("decoders");
    std::fs::create_dir_all(&decoders)?;
    for (name, model) in known::known_decoders() {
        model.write(decoders.join(format!("{name}.gguf")))?;
    }
    let listed = |tokens: &[u32]| {
        let tokens: Vec<String> = tokens.iter().map(ToString::to_string).collect();
        tokens.join(" ")
    };
    let texts = known::known_texts().map(|text| listed(&text));
    std::fs::write(folder.join("cases.txt"), cases)?;
    std::fs::write(folder.join("tokens.txt"), listed(&known::known_tokens()))?;
    let decoded = listed(&known::known_tokens()[..known::N_DECODED]);
    std::fs::write(decoders.join("tokens.txt"), decoded)?;
    std::fs::write(folder.join("embeddings.txt"), embeddings)?;
    std::fs::write(folder.join("texts.txt"), texts.join(" / "))?;
    Ok(())
}
