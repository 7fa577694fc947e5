#include "backends/metal/emulator/foundation.h"

namespace mlxtape::emulator {

void give_error(Id* out, const std::string& domain, long code, const std::string& what) {
  if (out != nullptr) *out = autorelease(new ErrorObject(domain, code, what));
}

void register_foundation() {
  static Class string("NSString", nullptr, destroy<String>);
  string.on_class(
      "stringWithUTF8String:", +[](Class*, Selector, const char* utf8) -> Id {
        if (utf8 == nullptr) violation("stringWithUTF8String: NULL");
        return autorelease(new String(utf8));
      });
  string.on(
      "UTF8String", +[](String* self, Selector) -> const char* { return self->text.c_str(); });

  static Class array("NSArray", nullptr, destroy<Array>);
  array.on_class(
      "arrayWithObject:", +[](Class*, Selector, Id object) -> Id {
        return autorelease(new Array({Reference<Object>(static_cast<Object*>(object))}));
      });
  array.on("count", +[](Array* self, Selector) -> unsigned long { return self->objects.size(); });
  array.on(
      "objectAtIndex:", +[](Array* self, Selector, unsigned long index) -> Id {
        if (index >= self->objects.size()) {
          violation("objectAtIndex: " + std::to_string(index) + " of an array of " +
                    std::to_string(self->objects.size()));
        }
        return self->objects[index].get();
      });

  static Class error("NSError", nullptr, destroy<ErrorObject>);
  error.on(
      "localizedDescription", +[](ErrorObject* self, Selector) -> Id {
        return autorelease(new String(self->description));
      });
  error.on("code", +[](ErrorObject* self, Selector) -> long { return self->code; });
  error.on(
      "domain",
      +[](ErrorObject* self, Selector) -> Id { return autorelease(new String(self->domain)); });

  static Class url("NSURL", nullptr, destroy<Url>);
  url.on_class(
      "fileURLWithPath:", +[](Class*, Selector, Id path) -> Id {
        return autorelease(new Url(as<String>(path, "NSString", "fileURLWithPath:")->text));
      });
}

}  // namespace mlxtape::emulator
