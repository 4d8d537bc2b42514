//! Files and folders written aside and renamed into place, so that a reader never sees half of one.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A file under way: `NAME.PID.tmp` beside its target, removed again when dropped unfinished.
#[derive(Debug)]
pub struct Aside {
    target: PathBuf,
    temporary: PathBuf,
    out: Option<BufWriter<File>>,
}

impl Aside {
    /// Writes a whole file: the one that was there stays until all is on the disk.
    ///
    /// # Errors
    /// If that fails: the one that was there, if any, is as it was.
    pub fn whole(target: &Path, bytes: &[u8]) -> Result<()> {
        let mut out = Aside::create(target)?;
        out.write(bytes)?;
        out.finish()
    }

    /// Starts a file that will become `target`, by which errors name it.
    ///
    /// # Errors
    /// A path that names no file, or a folder that is there; a file that cannot be made.
    pub fn create(target: &Path) -> Result<Aside> {
        let Some(name) = target.file_name() else {
            return Err(Error::new(target.display(), "a path that ends in a file name", "none"));
        };
        // Only renaming would find that out, at the end.
        if target.is_dir() {
            return Err(Error::new(target.display(), "a file", "a folder"));
        }
        let (temporary, file) = beside(target, name, |path| File::create_new(path))?;
        Ok(Aside {
            target: target.to_path_buf(),
            temporary,
            out: Some(BufWriter::with_capacity(1 << 20, file)),
        })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.out {
            Some(out) => out.write_all(bytes).map_err(|e| Error::io(self.target.display(), e)),
            None => Ok(()),
        }
    }

    /// Shows what was written so far as a file of `len` bytes, the rest zeros until it is written:
    /// where it is.
    ///
    /// # Errors
    /// If that fails.
    pub fn outline(&mut self, len: u64) -> Result<&Path> {
        if let Some(out) = &mut self.out {
            let extended = out.flush().and_then(|()| out.get_ref().set_len(len));
            extended.map_err(|e| Error::io(self.target.display(), e))?;
        }
        Ok(&self.temporary)
    }

    /// Flushes to disk and renames into place.
    ///
    /// # Errors
    /// If that fails: nothing is left then.
    pub fn finish(mut self) -> Result<()> {
        let io = |e| Error::io(self.target.display(), e);
        if let Some(mut out) = self.out.take() {
            let written = out.flush().and_then(|()| out.get_ref().sync_all());
            drop(out);
            if let Err(e) = written.and_then(|()| fs::rename(&self.temporary, &self.target)) {
                let error = io(e);
                self.discard();
                return Err(error);
            }
        }
        Ok(())
    }

    fn discard(&self) {
        // The error that led here matters more than a temporary file that could not be removed.
        drop(fs::remove_file(&self.temporary));
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if self.out.take().is_some() {
            self.discard();
        }
    }
}

/// A folder under way: `NAME.PID.tmp` beside its target, removed again when dropped unfinished.
#[derive(Debug)]
pub struct AsideFolder {
    target: PathBuf,
    temporary: PathBuf,
}

impl AsideFolder {
    /// Starts a folder that will become `target`.
    ///
    /// # Errors
    /// One that is there already, a path that names none, or one that cannot be made.
    pub fn create(target: &Path) -> Result<AsideFolder> {
        if target.exists() {
            let expected = "a folder that is not there yet";
            return Err(Error::new(target.display(), expected, "one that is"));
        }
        let Some(name) = target.file_name() else {
            return Err(Error::new(target.display(), "a path that ends in a name", "none"));
        };
        let (temporary, ()) = beside(target, name, |path| fs::create_dir(path))?;
        Ok(AsideFolder { target: target.to_path_buf(), temporary })
    }

    /// Where it is until it takes its name.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Copies the files of a model's folder that are no weights: configuration, tokenizer,
    /// template, licence.
    ///
    /// # Errors
    /// I/O.
    pub fn copy_all_but_weights(&self, from: &Path) -> Result<()> {
        let io = |path: &Path, e| Error::io(path.display(), e);
        for entry in fs::read_dir(from).map_err(|e| io(from, e))? {
            let path = entry.map_err(|e| io(from, e))?.path();
            let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
            let name = path.file_name().unwrap_or_default();
            let weights = WEIGHTS.contains(&ending) || name == "adapter_config.json";
            if path.is_file() && !weights {
                fs::copy(&path, self.temporary.join(name)).map_err(|e| io(&path, e))?;
            }
        }
        Ok(())
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// If that fails: nothing is left then.
    pub fn finish(self) -> Result<()> {
        fs::rename(&self.temporary, &self.target).map_err(|e| Error::io(self.target.display(), e))
    }
}

/// A new file or folder beside its target: `NAME.PID.tmp`, or `NAME.PID.N.tmp` where that is taken,
/// by another thread or by what a program with this number left when it was killed.
fn beside<T>(
    target: &Path,
    name: &OsStr,
    make: impl Fn(&Path) -> io::Result<T>,
) -> Result<(PathBuf, T)> {
    const MOST: usize = 1000;
    let mut number = 0;
    loop {
        let ending = if number == 0 { String::new() } else { format!(".{number}") };
        let mut own = name.to_os_string();
        own.push(format!(".{}{ending}.tmp", std::process::id()));
        let temporary = target.with_file_name(own);
        match make(&temporary) {
            Ok(made) => return Ok((temporary, made)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < MOST => number += 1,
            Err(e) => return Err(Error::io(target.display(), e)),
        }
    }
}

/// Endings of files of weights.
const WEIGHTS: &[&str] =
    &["safetensors", "bin", "gguf", "h5", "msgpack", "onnx", "ot", "pt", "pth"];

impl Drop for AsideFolder {
    fn drop(&mut self) {
        // It is not there any more if all went well.
        drop(fs::remove_dir_all(&self.temporary));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftovers_are_neither_written_to_nor_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let left = format!("out.{}.tmp", std::process::id());
        fs::write(at(&left), "left").unwrap();
        let (mut one, mut two) =
            (Aside::create(&at("out")).unwrap(), Aside::create(&at("out")).unwrap());
        one.write(b"one").unwrap();
        two.write(b"two").unwrap();
        one.finish().unwrap();
        assert_eq!(fs::read(at("out")).unwrap(), b"one");
        two.finish().unwrap();
        assert_eq!(fs::read(at("out")).unwrap(), b"two");
        fs::remove_file(at("out")).unwrap();
        let made = AsideFolder::create(&at("out")).unwrap();
        fs::write(made.path().join("file"), "in it").unwrap();
        made.finish().unwrap();
        assert_eq!(fs::read(at("out/file")).unwrap(), b"in it");
        assert_eq!(fs::read(at(&left)).unwrap(), b"left");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn errors_name_the_file_that_was_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing/file");
        let error = Aside::create(&missing).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", missing.display())), "{error}");
        let error = AsideFolder::create(&missing).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", missing.display())), "{error}");
        let error = Aside::create(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("expected a file, found a folder"), "{error}");
    }
}
