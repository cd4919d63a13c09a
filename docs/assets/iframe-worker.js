// Search runs in a worker, and browsers start none for a page that is opened from the disk: there a
// hidden frame takes its place. The theme looks for this file by its name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const pass = (target) => (data) => target.dispatchEvent(new MessageEvent("message", { data }));
      inside.postMessage = pass(this);
      inside.importScripts = (...urls) => Promise.all(urls.map(load));
      this.ready = load(url);
      this.toFrame = pass(inside);
      this.terminate = () => frame.remove();

      function load(address) {
        return new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(address, location.href);
          script.onload = resolve;
          script.onerror = reject;
          frame.contentDocument.body.append(script);
        });
      }
    }

    postMessage(data) {
      this.ready = this.ready.then(() => this.toFrame(data));
    }

    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
  };
}
