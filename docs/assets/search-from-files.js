// The search runs in a worker, which browsers refuse to pages that were opened as files. There this stands in for it:
// the worker's script in a hidden frame, with the same messages.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(source) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.frame.onload = () => this.start(new URL(source, document.baseURI));
      document.body.append(this.frame);
    }

    start(source) {
      const { contentWindow, contentDocument } = this.frame;
      contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = contentDocument.createElement("script");
      script.src = source;
      script.onload = () => {
        this.started = true;
        this.waiting.forEach((data) => this.deliver(data));
      };
      contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.started) {
        this.deliver(data);
      } else {
        this.waiting.push(data);
      }
    }

    deliver(data) {
      const { contentWindow } = this.frame;
      contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data }));
    }
  };
}
