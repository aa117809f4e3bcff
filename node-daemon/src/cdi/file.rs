//! Files that are whole or not there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

/// Replaces `path` by `content`: whoever reads it, also after a crash or a power cut, finds the old content or the new.
/// Makes the directory if it is missing. Errors name the file.
pub fn write_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, 0o644).map_err(|error| with_path("write", path, error))
}

/// The same for a program: whoever runs it gets the old one or the new.
pub fn write_program_atomically(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, 0o755).map_err(|error| with_path("write", path, error))
}

fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a path of a file in a directory"));
    };
    fs::create_dir_all(directory)?;
    // Hidden and without a suffix that anybody looks for: CDI caches read `*.json`, and so does the checkpoint.
    let temporary = directory.join(format!(".{}.new", name.to_string_lossy()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    // Whatever the umask.
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(directory)?.sync_all()
}

/// Removes a file; one that is not there is as good.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(with_path("remove", path, error)),
        Ok(()) => match path.parent() {
            Some(directory) => File::open(directory)?.sync_all(),
            None => Ok(()),
        },
    }
}

/// An I/O error that says what was tried, and with which file.
pub(crate) fn with_path(what: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_and_nothing_else_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/claim.json");
        write_atomically(&path, b"one").unwrap();
        write_atomically(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        remove(&path).unwrap();
        remove(&path).expect("already gone");
        let error = write_atomically(&directory.path().join("deep"), b"").unwrap_err();
        assert!(error.to_string().contains("deep"), "{error}");
    }
}
