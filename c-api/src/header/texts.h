
/* Returns the version of the library, such as "0.1.0". */
const char *highwater_version(void);

/* Returns the words of a status, such as "out of memory". */
const char *highwater_status_text(highwater_status status);

/* Returns the whole message of the last error of this thread: the function, the fault, the expected value and the remedy. It is valid
 * until the next error of this thread, and empty before the first. */
const char *highwater_last_error(void);

/* Returns the remedy of the last error of this thread. May be empty. */
const char *highwater_last_hint(void);

/* Writes the vendor's code of the last error of this thread, and returns true. Returns false if there is none. */
bool highwater_last_vendor_code(int64_t *code);

/* Frees a text of this library, and sets it to null. Does nothing with null. */
void highwater_text_release(char **text);
