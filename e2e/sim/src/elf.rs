//! The smallest shared object that the loader and `ldconfig` accept: a name and nothing else. It stands for the
//! driver's libraries that nobody calls in the simulation but that CDI generation must find.

/// Parts of the image and where they lie, in bytes.
const HEADER: u64 = 64;
const PROGRAM_HEADERS: u64 = 3;
const SYMBOLS: u64 = HEADER + PROGRAM_HEADERS * 56;
const HASH: u64 = SYMBOLS + 24;
const DYNAMIC: u64 = HASH + 16;
const DYNAMIC_SIZE: u64 = 7 * 16;
const STRINGS: u64 = DYNAMIC + DYNAMIC_SIZE;

/// An x86-64 ELF shared object with this `DT_SONAME`.
pub fn shared_object(soname: &str) -> Vec<u8> {
    let strings = [b"\0", soname.as_bytes(), b"\0"].concat();
    let size = STRINGS + strings.len() as u64;
    let mut image = Image(Vec::new());

    // ELF header: 64 bit, little endian, ET_DYN (3) for EM_X86_64 (62), no sections.
    image.bytes(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0").half(3).half(62).word(1);
    image.long(0).long(HEADER).long(0).word(0);
    image.half(64).half(56).half(PROGRAM_HEADERS as u16).half(64).half(0).half(0);

    // PT_LOAD of everything, writable because the loader relocates the dynamic section in place.
    image.segment(1, 0, size, 0x1000);
    // PT_DYNAMIC.
    image.segment(2, DYNAMIC, DYNAMIC_SIZE, 8);
    // PT_GNU_STACK: without it the loader would want an executable stack.
    image.segment(0x6474_e551, 0, 0, 16);

    // The null symbol, and a hash table with one empty bucket.
    image.long(0).long(0).long(0);
    image.word(1).word(1).word(0).word(0);

    // DT_SONAME, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_HASH, DT_NULL.
    image.long(14).long(1);
    image.long(5).long(STRINGS);
    image.long(6).long(SYMBOLS);
    image.long(10).long(strings.len() as u64);
    image.long(11).long(24);
    image.long(4).long(HASH);
    image.long(0).long(0);

    image.bytes(&strings);
    image.0
}

struct Image(Vec<u8>);

impl Image {
    fn bytes(&mut self, bytes: &[u8]) -> &mut Image {
        self.0.extend_from_slice(bytes);
        self
    }

    fn half(&mut self, value: u16) -> &mut Image {
        self.bytes(&value.to_le_bytes())
    }

    fn word(&mut self, value: u32) -> &mut Image {
        self.bytes(&value.to_le_bytes())
    }

    fn long(&mut self, value: u64) -> &mut Image {
        self.bytes(&value.to_le_bytes())
    }

    /// A program header with flags read and write, mapped at its offset.
    fn segment(&mut self, kind: u32, offset: u64, size: u64, align: u64) {
        self.word(kind).word(6).long(offset).long(offset).long(offset).long(size).long(size).long(align);
    }
}
